@echo off
rem Finds the Python of ComfyUI or ai-toolkit and runs rocm_setup.py with it. CAROM_PYTHON names one by hand.
rem Exit codes: docs/amd.md
setlocal DisableDelayedExpansion
set "PYTHONUTF8=1"
set "PY="
if not defined CAROM_PYTHON goto near
set "PY=%CAROM_PYTHON:"=%"
if not exist "%PY%\*" if exist "%PY%" goto run
echo CAROM_PYTHON names "%PY%", which is no program. Set it to the path of a python.exe, or clear it.
goto none
:near
for %%D in ("%~dp0..\..\ai-toolkit" "%~dp0..\..\ComfyUI" "%~dp0..\.." "%~dp0..\..\..") do for %%P in (.venv\Scripts venv\Scripts env\Scripts python_embeded) do if not defined PY if exist "%%~fD\%%P\python.exe" set "PY=%%~fD\%%P\python.exe"
if not defined PY if exist "%~dp0..\..\..\..\python_embeded\python.exe" set "PY=%~dp0..\..\..\..\python_embeded\python.exe"
if not defined PY if defined VIRTUAL_ENV if exist "%VIRTUAL_ENV%\Scripts\python.exe" set "PY=%VIRTUAL_ENV%\Scripts\python.exe"
if not defined PY if defined CONDA_PREFIX if exist "%CONDA_PREFIX%\python.exe" set "PY=%CONDA_PREFIX%\python.exe"
if not defined PY for %%X in (py.exe) do set "PY=%%~$PATH:X"
if not defined PY for %%X in (python.exe) do set "PY=%%~$PATH:X"
if not defined PY echo No Python found. Name the one of ComfyUI or ai-toolkit: set CAROM_PYTHON=C:\path\to\python.exe
if not defined PY goto none
:run
"%PY%" "%~dp0rocm_setup.py" %*
set "RC=%ERRORLEVEL%"
rem 9009: the Microsoft Store's placeholder for python.exe.
if not "%RC%"=="9009" goto end
echo "%PY%" starts no Python. Name the one of ComfyUI or ai-toolkit: set CAROM_PYTHON=C:\path\to\python.exe
:none
set "RC=10"
:end
rem Started by a double click there are no arguments, and the window would close at once.
if "%~1"=="" pause
exit /b %RC%
